"""gcp-storage-emulator, and the generation in the header of a download: TensorStore wants it, and Google sends it."""

from __future__ import annotations

import contextlib

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

download = objects.download


def with_generation(request, response, storage, *args, **kwargs):
    with contextlib.suppress(NotFound):  # the download says so itself
        stored = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = stored["generation"]
    return download(request, response, storage, *args, **kwargs)


objects.download = with_generation

if __name__ == "__main__":
    from gcp_storage_emulator.__main__ import main

    main()
