"""What the engine will need of a device's memory."""
