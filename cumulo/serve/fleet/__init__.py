"""What a server offers a gateway that has the fleet's key: its state, token ids in streams, and resumption."""
