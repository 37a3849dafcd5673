# A thin front: .ci/setup installs what is missing and picks the preset, CMakePresets.json does the rest.
.PHONY: help train test build clean

CONFIG ?= configs/tiny.yaml

help:
	@echo "make train   install what is missing, build, train $(CONFIG)   (CONFIG=path for another)"
	@echo "make test    install what is missing, build, run every test"
	@echo "make build   install what is missing, build"
	@echo "make clean   delete build/"
	@echo "PRESET=cpu|cuda|cuda-debug|asan chooses the build; without it the set-up picks cpu or cuda and says why."

train:
	@preset=$$(.ci/setup) && .ci/build "$$preset" heddle && exec build/$$preset/heddle train $(CONFIG)

test:
	@preset=$$(.ci/setup) && .ci/build "$$preset" all && exec ctest --preset "$$preset" -j "$$(nproc)"

build:
	@preset=$$(.ci/setup) && .ci/build "$$preset" all

clean:
	rm -rf build
