"""Process groups, one per version of a job's group, and the control words of each reduction."""
