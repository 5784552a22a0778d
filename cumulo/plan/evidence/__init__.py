"""Published measurements, and the planner's errors against them."""
