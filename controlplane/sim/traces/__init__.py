"""What is submitted, and when: traces that are read, imported, generated or recorded."""
