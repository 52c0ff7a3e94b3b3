"""Makes tests/ importable, so that every test can say `from scripted import ...`."""
