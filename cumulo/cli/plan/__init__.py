"""`cumulo plan`: predictions for training, serving and a whole cluster, and how accurate they have been."""
