"""GPU execution: CUDA graph capture, Triton kernels, and what can run where.

Importing this package needs neither Triton nor a GPU. ``swiglu`` and ``fused_layers``, which uses
it, need Triton and must be imported only after ``support`` reported no problem. The Triton kernels
also run on the CPU, slowly, under Triton's interpreter (TRITON_INTERPRET=1).
"""
