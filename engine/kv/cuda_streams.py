"""Streams, events and properties of PyTorch, with the types that it does not give them."""

from __future__ import annotations

import torch


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that waits for nobody by itself. Priority -1: its kernels go first."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


class current:
    """As torch.cuda.stream, for a stream of the current device, without its look at devices: that
    takes as long as all else that there is to do for a section. May be entered again and again, by
    one thread at a time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream.device_index)
        _set_current(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_current(*self._before)


def _set_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def make_event() -> torch.cuda.Event:
    """An event for order, without a time; until it is recorded nothing waits for it."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What is queued in the stream by now."""
    event = make_event()
    event.record(stream)
    return event


def mark_current(device: torch.device) -> torch.cuda.Event | None:
    """What the calling thread's current stream of a device has been given by now; None for a device
    that does at once what it is given. In the host it is waited for by `wait_for_compute` alone."""
    return record(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def is_over(event: torch.cuda.Event) -> bool:
    """Whether the GPU has come so far. Raises RuntimeError if it has failed."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def count_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
