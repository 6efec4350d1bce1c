"""One folder per provider; base.py has the interface that all of them implement."""
