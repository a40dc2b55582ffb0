"""Every remedy on one scale: at initialisation, by theory, put cold on a trained model, and trained."""
