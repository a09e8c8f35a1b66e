"""What a frame costs, counted in instructions."""
