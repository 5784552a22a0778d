"""Which adapters an engine has, and who uses them."""
