"""The controller: decides who trains where and with which batch, and remembers it."""
