"""Every stage of a Triton kernel, from its Python source to machine code, for a target that need not be here."""
