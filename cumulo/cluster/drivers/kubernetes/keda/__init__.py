"""KEDA's external scaler with Cumulo's autoscaling rule behind it."""
