"""What object stores need beyond what Orbax and etils do: TensorStore's address of a path, claims, and S3 for Orbax.

Credentials are the libraries' own business: they read them from the environment, and nothing here sees them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import fsspec
from etils import epath
from etils.epath import backend
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from ..core.errors import ShardstepError

_DRIVERS = {"gs": "gcs", "s3": "s3"}


def kvstore(directory: epath.Path | str) -> dict[str, Any]:
    """Where TensorStore finds the files of a directory, here or in a store."""
    text = str(directory)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return {"driver": "file", "path": f"{text}/"}
    bucket, _, path = rest.partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    elsewhere = (
        {"endpoint": endpoint} if scheme == "s3" and endpoint else {}
    )  # boto reads these; TensorStore must be told
    return {"driver": _DRIVERS[scheme], "bucket": bucket, "path": f"{path}/"} | elsewhere


def _system(name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The very file system that etils uses: it remembers listings, which must be forgotten there."""
    system = backend.fsspec_backend.fs(name)
    return system, system._strip_protocol(name)


def refresh(directory: epath.Path) -> None:
    """Forget listings: TensorStore and other processes write without fsspec's knowledge."""
    _system(str(directory))[0].invalidate_cache()


def claim(directory: epath.Path, token: str) -> bool:
    """Take a name that nobody has: the store creates the claim only if there is none. False: somebody was quicker."""
    system, path = _system(_claim_of(directory))
    try:
        system.pipe_file(path, token.encode(), mode="create")
    except FileExistsError:
        return False
    return system.cat_file(path) == token.encode()  # some servers do not know the condition


def claimed_by(directory: epath.Path) -> str:
    """The token of whoever claimed the name; empty if nobody did."""
    system, path = _system(_claim_of(directory))
    try:
        return system.cat_file(path).decode(errors="replace")
    except FileNotFoundError:
        return ""


def remove(directory: epath.Path, mark: str) -> None:
    """Its mark first: what is half deleted does not look whole."""
    for name in (str(directory / mark), str(directory), _claim_of(directory)):
        system, path = _system(name)
        system.invalidate_cache()
        found = [
            file for file in system.find(path) if file == path or file.startswith(f"{path}/")
        ]  # `3`, not `3.claim`
        if found:
            system.rm(found)
        system.invalidate_cache()


def _claim_of(directory: epath.Path) -> str:
    return f"{directory}.claim"


@functools.cache
def enable_s3() -> None:
    """Orbax 0.12 lists s3:// among what it reads and builds TensorStore addresses for gs:// alone.

    The only place that touches Orbax's private parts: three functions learn a second scheme.
    """
    functions = [
        (tensorstore_utils, "_use_gcs_driver"),
        (tensorstore_utils, "_normalize_path"),
        (gcs_utils, "get_kvstore_for_gcs"),
    ]
    if not all(hasattr(module, name) for module, name in functions):
        raise ShardstepError("s3:// paths need an Orbax that shardstep knows: install orbax-checkpoint 0.12")
    uses, normalize, address = (getattr(module, name) for module, name in functions)

    def with_s3(path: Any, **kwargs: Any) -> dict[str, Any]:
        if not str(path).startswith("s3://"):
            return address(path, **kwargs)
        found = kvstore(str(path).rstrip("/"))
        return found | {"path": found["path"].rstrip("/")}

    tensorstore_utils._use_gcs_driver = lambda path: path.startswith("s3://") or uses(path)
    tensorstore_utils._normalize_path = lambda path: normalize(path).replace("s3:/", "s3://").replace(":///", "://")
    gcs_utils.get_kvstore_for_gcs = with_s3
