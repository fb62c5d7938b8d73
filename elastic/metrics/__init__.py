"""What is measured of training: loss, speed, noise scale, and when the job is done."""
