"""`cumulo compile`: kernels and models through a compiler, every stage of it visible. A verb is a module here."""
