"""Backends for models of rows: scikit-learn, XGBoost, LightGBM, CatBoost and Treelite."""
