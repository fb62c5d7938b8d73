"""How measured applications train: tables in the layout of Pollux' simulator."""
