"""A plan: its fields, the plans we ship, and the points it unfolds into."""
