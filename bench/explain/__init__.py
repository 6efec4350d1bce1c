"""What limits a run, and what a change would give."""
