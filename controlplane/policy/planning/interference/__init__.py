"""What neighbours cost each other, and where jobs go so that they lose least by it."""
