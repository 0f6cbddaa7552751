"""Reading and writing of traces: files of lines, and recorded runs among them."""

from blockstep.conformance.protocol.trace_lines import TraceError, read_lines
from blockstep.conformance.recorded.traces.recorded import (
    TRACE_FORMAT,
    TRACE_VERSION,
    Excuse,
    Trace,
    TraceStep,
    read_trace,
    write_trace,
)

__all__ = [
    "TRACE_FORMAT",
    "TRACE_VERSION",
    "Excuse",
    "Trace",
    "TraceError",
    "TraceStep",
    "read_lines",
    "read_trace",
    "write_trace",
]
