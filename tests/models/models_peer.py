"""The networks of models_test.cpp in Python: models_peer.py FOLDER writes initial values, inputs and
outputs there.

ResNet-18 is written out as torchvision.models.resnet18 has it (version 0.29 gives the same bits).
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inputs, planes, stride, downsample):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self.stage(64, 64, 1)
        self.layer2 = self.stage(64, 128, 2)
        self.layer3 = self.stage(128, 256, 2)
        self.layer4 = self.stage(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stage(self, inputs, planes, stride):
        downsample = None
        if stride != 1:
            downsample = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )
        return nn.Sequential(
            BasicBlock(inputs, planes, stride, downsample), BasicBlock(planes, planes, 1, None)
        )

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        layers, inputs = [], 3
        for planes in (8, 16):
            layers += [
                nn.Conv2d(inputs, planes, 3, padding=1, bias=False),
                nn.BatchNorm2d(planes),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            inputs = planes
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, 10)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


MODELS = {
    "linear": (lambda: nn.Linear(12, 3), (4, 12)),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
        ),
        (4, 12),
    ),
    "mlp_dropout": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3)),
        (4, 12),
    ),
    "convnet": (ConvNet, (4, 3, 9, 12)),
    "resnet18": (lambda: ResNet18(1000), (2, 3, 40, 48)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(7)
        net = make()
        tensors = {f"net.{key}": value.clone() for key, value in net.state_dict().items()}
        tensors["input"] = torch.randn(shape)
        tensors["output"] = net(tensors["input"]).detach()
        save_file(tensors, f"{sys.argv[1]}/{name}.safetensors")
