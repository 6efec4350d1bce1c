"""The report: its page, its plots, several runs side by side."""
