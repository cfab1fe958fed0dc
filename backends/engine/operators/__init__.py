"""What a decoder does between its products of matrices, once for each way of computing it.

`reference` is torch and defines the arithmetic; `native` is C for CPUs, compiled on the spot. Both
satisfy `base.Operators`, and tests hold the second to the first.
"""
