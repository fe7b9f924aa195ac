"""Ways of looking at a schedule: one file each, pure, for a laptop."""
