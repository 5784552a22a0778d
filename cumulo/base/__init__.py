"""What every room may use: reports, numbers for people, strict dataclasses, this machine's memory, sandboxes."""
