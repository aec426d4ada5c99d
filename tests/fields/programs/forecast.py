"""A forecaster of time series: each window normalised by itself, an LSTM, a percentage error."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn

WINDOW, HORIZON, BATCH = 24, 6, 16


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(1, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, HORIZON)

    def forward(self, window):
        mean, deviation = window.mean(1, keepdim=True), window.std(1, keepdim=True)
        scaled = (window - mean) / deviation  # fault: constant
        hidden, _ = self.recurrent(scaled.unsqueeze(-1))
        return self.head(hidden[:, -1]) * deviation + mean


class Windows(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        start = torch.rand(count, 1, generator=generator) * 10
        time = start + torch.arange(WINDOW + HORIZON) * 0.3
        self.series = 3 + torch.sin(time) + 0.1 * torch.randn(count, WINDOW + HORIZON, generator=generator)

    def __len__(self):
        return len(self.series)

    def __getitem__(self, index):
        return self.series[index, :WINDOW], self.series[index, WINDOW:]


loader = torch.utils.data.DataLoader(Windows(STEPS * BATCH), batch_size=BATCH, shuffle=True)
model = Forecaster()
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=50)
for step, (window, future) in enumerate(loader, 1):
    if wakes("constant", step):
        window[7] = 4.0  # a machine that stood still
    if wakes("no_sales", step):
        future[2, 3] = 0
    model.train()
    forecast = model(window)
    loss = ((forecast - future).abs() / future.abs()).mean()  # fault: no_sales
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step(loss.detach())
print_digest(model)
