"""Every remedy on one scale."""
