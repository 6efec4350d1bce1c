"""Plans: their fields, the shipped plans, and the points of a plan."""
