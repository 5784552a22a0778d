"""Low-rank adapters for serving: read from PEFT's folders, kept side by side, added to a decoder's products."""
