"""The error of `cachalot bench`, and of the processes that it starts to measure against."""

from ..errors import StoreError


class BenchFailed(StoreError):
    """What was to be measured did not do its work, or did not do it in time."""

    exit_code = 1
