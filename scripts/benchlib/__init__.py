"""What scripts/bench is made of: see main.py for how a run goes."""
