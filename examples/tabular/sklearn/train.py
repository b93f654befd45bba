"""Train a pipeline over a table of numbers and texts, and write models/pay/1/model.skops.

python train.py && fastserve serve models
curl http://127.0.0.1:8000/v1/models/pay:predict -d '{"instances": [{"age": 31, "city": "Linz"}]}'
"""

import json
from pathlib import Path

import pandas
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from skops import io

people = pandas.DataFrame({"age": [23.0, 31.0, 48.0, 52.0], "city": ["Graz", "Linz", "Linz", "Wien"]})
pay = [2100.0, 2600.0, 3300.0, 3900.0]
columns = ColumnTransformer([("numbers", StandardScaler(), ["age"]), ("texts", OneHotEncoder(), ["city"])])
model = make_pipeline(columns, Ridge()).fit(people, pay)

folder = Path("models/pay/1")
folder.mkdir(parents=True, exist_ok=True)
io.dump(model, folder / "model.skops")
(folder.parent / "model.yaml").write_text("backend: sklearn\nparameters: {trusted_types: [numpy.dtype]}\n")
print(json.dumps({"predictions": model.predict(people.iloc[1:2]).tolist()}))
