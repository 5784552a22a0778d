"""Training of a head that drafts for a given model (`cumulo train` with `kind: eagle`)."""
