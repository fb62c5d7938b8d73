"""What each input means: free functions, one module for each subject."""
