"""Adding up in pairs: sums of 2, 4 or 8 parts as a binary tree. Ranks that hold some of the parts then have whole
branches of it, and the bits are those of one rank that holds all. Used by kernels that add up ranks, or parts."""

import triton
import triton.language as tl


@triton.jit
def add_in_pairs(x, index, one, two, four, COUNT: tl.constexpr):
    """Take in part number `index` of COUNT, in their order: (its branch so far, the branches of one, two and four
    parts that wait for later ones). After the last part the branch is the sum of all. Those that wait are zeros at
    first. COUNTs that are no powers of two are added one by one."""
    if COUNT == 2 or COUNT == 4 or COUNT == 8:
        if index % 2 == 0:
            one = x
        else:
            x = one + x
            if index % 4 == 1:
                two = x
            else:
                x = two + x
                if index % 8 == 3:
                    four = x
                else:
                    x = four + x
    else:
        x = one + x
        one = x
    return x, one, two, four
