"""Training of `harmony-drl`: an environment of its own, reward model, actor and critic."""
