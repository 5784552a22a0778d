"""What training saves by computing while messages travel: `cumulo bench overlap`."""
