"""Errors of the erasure package. Each one also is the built-in error a caller would expect.

    ErasureError
    +-- CodeShapeError (ValueError)                 k and m outside what a code may have
    +-- ShardSelectionError (ValueError)            missing or available name impossible shards
    +-- ShardLengthError (ValueError)               shard_bytes is not a positive int
    +-- BufferCountError (ValueError)               lists of buffers that do not fit together
    +-- BufferLengthError (ValueError)              a buffer is too short
    +-- BufferAccessError (BufferError)             no buffer, not contiguous, or read-only
    +-- BufferOverlapError (ValueError)             a target shares bytes with another buffer
    +-- AddressTableError (ValueError)              an address table of wrong dtype or shape
    +-- SingularMatrixError (ValueError)            a matrix that has no inverse
    +-- UnknownMultiplierError (ValueError)         no back end has this name
    +-- MultiplierUnavailableError (ImportError)    the back end's library is not installed
    +-- MultiplierConflictError (RuntimeError)      a second build of ISA-L was asked for
    +-- MultiplierRefusedError (RuntimeError)       the back end computed wrong bytes

Not for losses a code can repair: those are its work, not errors.
"""

from __future__ import annotations


class ErasureError(Exception):
    """A request this package cannot carry out; says what was given and what was expected."""

    def __init__(self, what: str, given: object, expected: object) -> None:
        # All three go to args, so that the error survives pickling between processes.
        super().__init__(what, given, expected)
        self.what = what
        self.given = given
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.what}: given {self.given}, expected {self.expected}"


class CodeShapeError(ErasureError, ValueError):
    """The numbers of data and parity shards do not make a code."""


class ShardSelectionError(ErasureError, ValueError):
    """Shard indices out of range, repeated, of a wrong count, or both missing and available."""


class ShardLengthError(ErasureError, ValueError):
    """A shard length that is not a positive number of bytes."""


class BufferCountError(ErasureError, ValueError):
    """Lists of buffers whose lengths do not fit together."""


class BufferLengthError(ErasureError, ValueError):
    """A buffer shorter than the shards it must hold."""


class BufferAccessError(ErasureError, BufferError):
    """An object without contiguous bytes, or without write access where it is needed."""


class BufferOverlapError(ErasureError, ValueError):
    """A target that shares bytes with a source or with another target."""


class AddressTableError(ErasureError, ValueError):
    """An address table of the wrong dtype or shape, or with a null address."""


class SingularMatrixError(ErasureError, ValueError):
    """A matrix over GF(2^8) without an inverse."""


class UnknownMultiplierError(ErasureError, ValueError):
    """A name that belongs to no back end."""


class MultiplierUnavailableError(ErasureError, ImportError):
    """A back end whose library cannot be found or loaded here."""


class MultiplierConflictError(ErasureError, RuntimeError):
    """A second ISA-L build in a process that has loaded one already."""


class MultiplierRefusedError(ErasureError, RuntimeError):
    """A back end whose self-check failed: its bytes must not reach a user."""
