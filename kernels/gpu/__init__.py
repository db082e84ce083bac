"""Operations in TileLang, for a CUDA device: same names and contracts as in `kernels.reference`.

Importing any module of this package imports TileLang (seconds), so whoever has a choice imports it
only where there is a CUDA device to run on. TileLang is the extra `gpu` of this project.
"""

try:
    import tilelang  # noqa: F401
except (ImportError, OSError) as error:
    raise ImportError(
        "kernels.gpu needs TileLang, which could not be imported; "
        "install this project with its extra gpu, or use kernels.reference"
    ) from error
