"""What `adamerge.tune` is made of: a bench that tries a recipe in one sweep, schedules of a wanted cost, a journal."""
