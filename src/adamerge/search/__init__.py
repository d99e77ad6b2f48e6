"""Find a recipe for a wanted cost: by search, by a schedule, or by one knob of a method."""
