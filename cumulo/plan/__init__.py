"""Know before you run: memory, time, bytes and money of a plan, with intervals and evidence. Pure, no torch."""
