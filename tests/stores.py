"""Object stores on this machine: servers that speak S3 and Google Cloud Storage, and what clients need to find them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from launch import WORKERS, free_port

BIN = Path(sys.executable).parent
SECRET = "a-secret-that-nobody-writes-down"


def s3(port):
    url = f"http://127.0.0.1:{port}"
    command = [BIN / "moto_server", "-H", "127.0.0.1", "-p", port]
    environment = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,  # boto and TensorStore
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return command, environment


def gcs(port):
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, WORKERS / "gcs_server.py", "start", "--host", "127.0.0.1", "--port", port, "--in-memory"]
    environment = {
        "STORAGE_EMULATOR_HOST": url,  # gcsfs
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "tests",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GCE_METADATA_ROOT": "127.0.0.1:1",  # nobody there: do not look for credentials for long
        "NO_GCE_CHECK": "true",
    }
    return [*command, "--default-bucket", "bucket"], environment


SERVERS = {"s3": s3, "gs": gcs}


@contextlib.contextmanager
def serving(kind, log):
    """A server with a bucket; the value is what the environment of its clients must hold."""
    port = free_port()
    command, environment = SERVERS[kind](port)
    with open(log, "w") as output:
        server = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield environment
    finally:
        server.terminate()
        server.wait()
