"""Kernels for the small batches of speculative decoding, each with a reference in plain torch.

Nothing here needs flash-attn or a GPU to be imported. The kernels' own files (``tree_attention``,
``swiglu``, and ``modules``, which uses them) need Triton, and are imported only once ``support``,
which says what can run where, has found that they can be. The Triton kernels also run on the CPU,
slowly, under Triton's interpreter (TRITON_INTERPRET=1).
"""
