"""Adding up in pairs: sums of 2 or 4 parts as a binary tree. Ranks that hold some of the parts then have whole
branches of it, and the bits are those of one rank that holds all. Used by kernels that add up ranks, or parts."""

import triton
import triton.language as tl


@triton.jit
def add_in_pairs(x, index, one, two, COUNT: tl.constexpr):
    """Take in part number `index` of COUNT, in their order: (its branch so far, what waits for later parts). After
    the last part the branch is the sum of all. The two that wait are zeros at first. Other COUNTs are added one by
    one."""
    if COUNT == 2 or COUNT == 4:
        if index % 2 == 0:
            one = x
        else:
            x = one + x
            if COUNT > 2:
                if index % 4 == 1:
                    two = x
                else:
                    x = two + x
    else:
        x = one + x
        one = x
    return x, one, two
