"""Kernels for the small batches of speculative decoding, each with a reference in plain torch.

Nothing here needs Triton, flash-attn or a GPU to be imported; ``support`` says what can run where.
The Triton kernels also run on the CPU, slowly, under Triton's interpreter (TRITON_INTERPRET=1).
"""
