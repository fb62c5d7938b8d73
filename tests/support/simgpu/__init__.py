"""`simgpu`, a simulated accelerator, and a double of NCCL for it: what a test knows of GPUs without one."""
