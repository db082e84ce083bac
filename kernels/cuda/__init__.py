"""A back end of plain torch operations for GPUs: few and large kernels, and no question to the
device whose answer the host would wait for."""
